"""The tier that machines share: what is known of it, what is asked of it, and what goes there."""
