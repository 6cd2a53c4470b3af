"""What JSON routes of several protocols share: reading bodies, fields, names of fields, writing numbers."""
