"""What the tests of all wings share: the multi-process runner, references and tolerances.

`distributed.run_distributed` is the only way in which tests start ranks. `references.dense_attention` is attention in
fp64, and `references.visible` defines a mask token by token. `tolerances` defines when a result is accurate enough.
`verify.verify` proves that a plan computes attention.
"""
