"""What transfers cost engines that are busy (``kvxfer bench load``)."""
