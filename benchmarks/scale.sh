#!/usr/bin/env bash
# Scaling on the cores of this machine, in at most ten minutes: benchmarks/scale.sh [--counts 1,2,4] [--minutes 10]
# In an environment with daskgpt and its extra `study`; PyTorch is measured where it is installed.
set -euo pipefail
cd "$(dirname "$0")/.."
exec python benchmarks/scale.py "$@"
