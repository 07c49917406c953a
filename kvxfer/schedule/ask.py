"""The life of a search for a prompt's prefix at other engines: one record, and one table. ``docs/engine-room.md`` draws the table."""
