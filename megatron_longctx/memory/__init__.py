"""What a training step needs of a device's memory, predicted from the configuration alone.

`predict` gives every term by name, `report` prints them, `check` refuses what does not fit, and `max_length` answers
how long a sequence fits.
"""

from .fit import COMFORT, check, max_length
from .model import STATES_PIECE, Phase, Prediction, Term, predict
from .report import report, summary
from .shapes import Job
