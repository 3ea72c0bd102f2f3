"""The part of one rank: joins the run, agrees on what to resume, records every step, and observes the training's traffic."""
