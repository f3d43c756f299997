"""The cost model: messages, memory and time of each schedule. Schedules do not import it."""
