"""The device memory that a training step needs, predicted from the configuration alone.

`predict` gives every term by name, `report` prints them, `check` refuses a step that does not fit, and `max_length`
finds the longest sequence that fits.
"""

from .command import report, summary
from .fit import COMFORT, check, max_length
from .model import STATES_PIECE, Phase, Prediction, Term, predict
from .shapes import Job
