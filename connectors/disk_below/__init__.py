"""A disk tier for engines that manage their own host memory. Adapters for particular engines do not belong here."""
