"""What sequences are doing: prefilling, verifying, proposing. One job a command."""
