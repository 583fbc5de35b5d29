"""What a sidecar says of itself to those who ask: started, alive, ready, and in numbers."""
