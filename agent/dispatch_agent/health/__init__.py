"""What a running watch answers when it is asked how it is: over HTTP, and at its end in one short text."""
