"""Pure code: versions, ownership, one host's protocol and the leader's book, layouts, schedules. No torch, clock or I/O."""
