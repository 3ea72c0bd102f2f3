"""Communication between processes: messages, frames, protected connections, pages of shared memory."""
