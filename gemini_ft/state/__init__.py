"""The live training state: finding it, naming it, copying it out of a step and back in."""
