"""What a layer keeps when it is recomputed in backward: its input and attention's results, on the device or the host.

`AttentionTape` records the results of attention in one run of a layer and plays them back when the layer runs again.
Attention and its communication therefore run once per step, as in DistFlashAttn.
"""

from .stores import DeviceStore, HostStore, Kept, Store
from .tape import AttentionTape
