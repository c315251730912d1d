#!/usr/bin/env python3
"""End-to-end tests of the program.

Usage: cli_test.py CLO_BINARY SOURCE_DIR [-k PATTERN]

Every test runs the binary in a folder of its own and checks the exit status, what it wrote where,
and that nothing is left behind.
"""
import os
import sys
import unittest

import program

MODULES = ["bad_models_test", "bad_flags_test", "prompts_test", "run_test", "chat_test",
           "measure_test", "profile_test", "suites_test", "gguf_test", "gpu_test"]


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    program.CLO, program.SOURCE = sys.argv[1:3]
    # The same tests on every machine: a GPU has other budgets and chunks. gpu_test gives it back.
    program.DEVICES = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    loader = unittest.TestLoader()
    if sys.argv[3:4] == ["-k"]:
        loader.testNamePatterns = [f"*{pattern}*" for pattern in sys.argv[4:]]
    suite = unittest.TestSuite(loader.loadTestsFromName(name) for name in MODULES)
    result = unittest.TextTestRunner(verbosity=2).run(suite)
    sys.exit(0 if result.wasSuccessful() else 1)


if __name__ == "__main__":
    main()
