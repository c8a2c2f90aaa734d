#!/usr/bin/env bash
# NetworKit 11.3: a pickled graph has its edges and weights, but not the attributes of its nodes and
# edges, and pickling says nothing of it.
#
# Expected: the attributes, or an error when the graph is pickled.
# Seen: RuntimeError, no such attribute, where the copy is asked for them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check networkit==11.3
cd "$folder"
"$folder/venv/bin/python" - <<'CODE'
import pickle

import networkit

graph = networkit.Graph(3, weighted=True)
graph.addEdge(0, 1, 2.5)
graph.attachNodeAttribute("label", int)[0] = 7
loaded = pickle.loads(pickle.dumps(graph))
assert loaded.numberOfNodes() == 3 and loaded.weight(0, 1) == 2.5
assert graph.getNodeAttribute("label", int)[0] == 7
try:
    loaded.getNodeAttribute("label", int)
except RuntimeError as error:
    print("the copy:", error)
else:
    raise SystemExit("the attributes travel by now")
CODE
