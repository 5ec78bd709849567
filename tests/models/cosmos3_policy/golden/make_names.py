"""Names and shapes of the released transformer in Diffusers' layout, and what NVIDIA's framework makes of each name.

    python3.12 -m venv oracle && oracle/bin/pip install torch==2.11 diffusers==0.39 transformers==5.5.4
    git clone https://github.com/NVIDIA/cosmos-framework && git -C cosmos-framework checkout 5eee9ed
    oracle/bin/python make_names.py cosmos-framework/cosmos_framework/inference/model.py names.json

Layers are all alike: layer 0 stands for them, as `layers.N`.
"""

import ast
import json
import re
import sys
from pathlib import Path

import torch
from diffusers import Cosmos3OmniTransformer

source, out = map(Path, sys.argv[1:])
# The table of names and the function that applies it, without the framework around them.
wanted = {"_DIFFUSERS_KEY_MAPPING_RES", "_apply_diffusers_key_mapping"}
kept = [
    node
    for node in ast.parse(source.read_text()).body
    if getattr(node, "name", None) in wanted
    or (isinstance(node, ast.AnnAssign) and getattr(node.target, "id", None) in wanted)
]
scope = {"re": re}
exec(compile(ast.Module(kept, []), str(source), "exec"), scope)
framework = scope["_apply_diffusers_key_mapping"]

with torch.device("meta"):
    network = Cosmos3OmniTransformer(action_gen=True, action_dim=64)
state = network.state_dict()
rows = [
    [name.replace("layers.0.", "layers.N."), framework(name).replace("layers.0.", "layers.N."), list(tensor.shape)]
    for name, tensor in state.items()
    if re.match(r"layers\.(?!0\.)", name) is None
]
parameters = sum(parameter.numel() for parameter in network.parameters())
out.write_text(
    json.dumps({"layers": len(network.layers), "parameters": parameters, "tensors": len(state), "names": rows})
)
