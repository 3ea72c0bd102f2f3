"""Writing a checkpoint so that tools without gemini-ft can open it: ``gemini export``.

source      which checkpoint: in the memory of agents, or in storage
assemble    shards of all ranks -> whole tensors
state       whole tensors -> the state dicts of models and optimizers
lightning, dcp, safetensors     one format each
target      where it is written: whole, or not at all
command     the command line
"""
