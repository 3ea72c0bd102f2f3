"""Writing a checkpoint so that tools without gemini-ft can open it: ``gemini export``.

source       which checkpoint: in the memory of agents, or in storage
whole_tensors  shards of all ranks -> whole tensors
state_dicts  whole tensors -> the state dicts of models and optimizers
zero         the same of DeepSpeed's engines, and the folder that one continues from
formats      one function each: Lightning, torch.distributed.checkpoint, safetensors
target       where it is written: whole, or not at all
"""
