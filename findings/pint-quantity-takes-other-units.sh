#!/usr/bin/env bash
# Pint 0.25.3: a quantity of a registry that defines a unit of its own has another value and another
# dimension once it has been pickled, without an error, if the default registry knows that name.
#
# Expected: an error, or the definition travels with the quantity.
# Seen: 3 cycles of 5 seconds are 15 seconds before, and 18.85 radians after.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check pint==0.25.3
cd "$folder"
"$folder/venv/bin/python" - <<'CODE'
import pickle

import pint

registry = pint.UnitRegistry()
registry.define("cycle = 5 second")
before = 3 * registry.cycle
after = pickle.loads(pickle.dumps(before))
print(before.to_base_units(), "->", after.to_base_units())
assert before.to("second").magnitude == 15
assert str(after.to_base_units().units) == "radian" and abs(after.to_base_units().magnitude - 18.8496) < 1e-3
CODE
