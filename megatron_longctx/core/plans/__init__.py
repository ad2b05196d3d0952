"""Parallelism modes as plans, and plans as recordings of what each rank does.

- `mask` defines what tokens see, `visibility` what ranks see of each other, and `plan` the type `Plan`.
- `build_plan("zigzag", n, mask)` plans one pass of a mask over ranks. `backward_plan` derives its backward plan,
  `testing.verify` proves either correct, and `planner`'s `describe` and `draw` show them.
- `record` turns a plan into the recording that a rank replays.
- `modes/` has the modes and `cache_modes/` those over a KV cache. To add one, add its file there.
"""

from .backward import backward_plan, keep_received, keeps_received, node_size_to_sum, sum_in_nodes, transpose
from .build import build_plan
from .kernel_calls import KernelCall, KernelSupport, Segment, kernel_calls
from .mask import Document, Mask
from .modes import MODES, Mode, ModeOptions, find_mode
from .plan import ALL_HEADS, RESULTS, Attend, Block, Heads, Kind, Move, Plan, Step
from .recorder import Recorder, record
from .recording import Recording
from .slices import Slice
from .workload import Target, Workload
