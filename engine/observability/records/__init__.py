"""Records: what each request has taken, in names and numbers."""
