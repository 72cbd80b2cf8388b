"""What a tier that machines share is good for, and what it costs when it fails."""
