"""What a model is asked about long texts, and how its answers are scored and written down; no ranks, no torch.

`questions` makes texts of exact lengths with `Haystack` and the `TASKS` (needles, and those of RULER that need no
download); `score` says how much of the answer was given; `positions` and `results` give losses by position, tables and
pictures. The verb `eval` asks a run.
"""

from .asking import DEPTHS, Question, questions
from .haystack import Haystack
from .scoring import Score, score, scores
from .tasks import TASKS, Task
