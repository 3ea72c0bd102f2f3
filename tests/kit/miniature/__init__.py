"""A job in miniature: hosts, their memory and the network around the protocol's state machines, in one process.

No clock, no socket, no thread. Everything that can happen next is an event, and whoever drives the job chooses
(``test_protocol_machine.py``). What the agents around the state machines must do is modelled too, because the
protocol is only as right as that: its rules are marked "the agent's duty".

``wire``      memory that remembers who wrote it, connections whose bytes are read when they arrive
``transfer``  shards on their way to a peer, and shards that are read
``worker``    ranks that train, die, or live on after their time; uploads
``host``      one host's agent around ``protocol.Host`` and, beside rank 0, ``ledger.Ledger``
``truth``     what sessions really come to, compared with what the protocol believes
``job``       all of them, restarts, storage
"""
