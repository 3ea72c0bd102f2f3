"""Whole runs in one process: the package's own agents, resuming and storing, with simulated time, network, processes and storage.

Nothing of the protocol is modelled here. Doubles stand at the outermost seams only:

``loop``      asyncio on a clock that jumps to the next timer; processes that stop and die; blocking calls that take simulated time
``network``   connections between hosts, below `gemini_ft.wire.tcp.Connection`
``visitor``   a process that is no worker, and reads agents' memory
``storage``   objects in memory that come late, fail and are hidden from lists
``worker``    a rank: joins and chooses by the package's own code, trains bytes in place of tensors
``world``     hosts, their agents, restarts, faults; everything that happens is drawn from one seed
``audit``     what becomes of each slot of each agent, seen from below the protocol
``history``   what must hold of everything that was recorded
``campaign``  many seeds, each in a process of its own
``mutations`` the package broken on purpose: what the others see of it
``drawn``     the same, in places that a seed draws
"""
