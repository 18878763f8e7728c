"""Ways in: functions, modules, Dynamo's graphs; and the entries of a compiled callable."""
