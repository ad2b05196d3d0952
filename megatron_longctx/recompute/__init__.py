"""What a layer keeps when it is recomputed in backward: its input and attention's results, on the device or the host.

`AttentionTape` records what one run of a layer got from attention and plays it back when the layer is run again, so
that attention and its communication run once per step, as in DistFlashAttn.
"""

from .stores import DeviceStore, HostStore, Kept, Store
from .tape import AttentionTape
