"""Questions to models about long texts, and how answers are scored and recorded; without ranks and torch.

`questions` makes texts of exact lengths with `Haystack` and the `TASKS` (needles, and RULER's tasks that need no
download). `score` gives the share of the answer that was found. `positions` and `results` give losses by position,
tables and pictures. The verb `eval` evaluates a run.
"""

from .asking import DEPTHS, Question, questions
from .haystack import Haystack
from .results import Score, score, scores
from .tasks import TASKS, Task
