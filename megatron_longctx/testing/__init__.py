"""What tests of every room share: the multi-process runner, references and tolerances.

`distributed.run_distributed` is the one way that tests start ranks; `references.dense_attention` is attention in fp64
written out, and `references.visible` what a mask means token by token; `tolerances` says when a result is accurate
enough.
"""
