"""Ask a run for needles and RULER's tasks (docs/evaluation.md): `python -m analysis.needles RUN [WORDS...]`."""

import logging
import sys

from analysis.needles.job import job_of, work
from megatron_longctx.core.errors import JobFailed
from megatron_longctx.serving.inference_job import start


def main(words: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        job = job_of(words)
        job.options.out.mkdir(parents=True, exist_ok=True)
        start(job, work)
    except (ValueError, JobFailed) as error:
        print(f"needles: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
