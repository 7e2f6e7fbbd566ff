#!/usr/bin/env bash
# Scaling on the cores of this machine, in at most ten minutes: benchmarks/scale.sh [--counts 1,2,4] [--minutes 10]
set -euo pipefail
cd "$(dirname "$0")/.."
if ! python -c "import daskgpt, matplotlib" 2>/dev/null; then
    python3 -m venv .venv-scale
    . .venv-scale/bin/activate
    pip install --quiet -e ".[study]"
    pip install --quiet torch --index-url https://download.pytorch.org/whl/cpu || echo "without PyTorch"
fi
exec python benchmarks/scale.py "$@"
