"""Predicts the device memory of a training step from the configuration alone.

`predict` returns every term by name, `report` prints them, `check` refuses a step that does not fit, and `max_length`
finds the longest sequence that fits.
"""

from .model import STATES_PIECE, Prediction, checkpoint_bytes, predict
from .reports import SAFE_SHARE, check, max_length, report, summary
from .shapes import Job
