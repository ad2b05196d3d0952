"""What a model is asked about long texts, and how its answers are scored and written down; no ranks, no torch."""

from .asking import DEPTHS, Question, questions
from .haystack import Haystack
from .scoring import Score, score, scores
from .tasks import TASKS, Task
