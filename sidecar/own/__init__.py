"""The endpoint for engines that attach with kvtier's own protocol rather than LMCache's."""
