"""Libraries of back ends by themselves: the ceilings that ``kvxfer bench transfer`` compares with."""
