"""Parallelism modes as plans, plans as programs.

- `mask` says what tokens see, `visibility` what ranks see of each other, `plan` what a `Plan` is.
- `build_plan("zigzag", n, mask)` plans one pass of a mask over ranks; `backward_plan` derives its backward; `verify`
  proves either; `describe` and `draw` show it.
- `lower` turns it into the programs that ranks run, that `simulate` prices and `memory` counts; `select` ranks modes.
- `modes/` has the modes, `cache_modes/` those over a KV cache: to add one, write its file there.
"""

from .build import build_plan
from .cost import Costs, KernelSample, MessageSample, Workload
from .kernel_calls import KernelCall, Segment, Takes, kernel_calls
from .lower import Lowering, lower
from .mask import Document, Mask, Slice
from .modes import MODES, Mode, ModeOptions, find_mode
from .overlap import backward_plan
from .plan import ALL_HEADS, RESULTS, Attend, Block, Heads, Kind, Move, Plan, Step
from .program import Program
from .relay import ranks_to_sum, summing_in_nodes
from .save_remote import keeping, keeps_received
from .target import Target
from .transpose import transpose
from .verify import PlanError, verify
