"""Questions to models about long texts, and how answers are scored and recorded; without ranks and torch.

`make_questions` makes prompts of exact lengths with a `Haystack` and the `TASKS`: needles, and RULER's tasks that need
no download. `score` returns the share of the expected answers in an answer. `results` has losses by position, tables
and pictures. The verb `eval` evaluates a run.
"""

from .questions import DEPTHS, TASKS, Haystack, Question, make_questions
from .results import score
