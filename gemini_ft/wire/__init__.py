"""What processes say to each other and how it travels: messages, frames, protected connections, pages of shared memory."""
