"""How a schedule is judged: rules and bytes by the order of its steps, time by clocks."""
