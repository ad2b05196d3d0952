"""What a plan costs, in seconds and bytes, without running it.

- `simulate` predicts the time of a plan on a described cluster, from the costs in `cost`. `choose_mode` ranks modes
  by it.
- `calibration` reads and writes measured costs. `measure_links` measures the links of a process group.
- `memory` predicts the peak of a training step, `step_time` its seconds, `flops` its work.
- `describe` and `draw` show plans.
"""
