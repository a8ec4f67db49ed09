"""GPU faults in the kernel log: reads records, recognises faults, groups them, and finds their cause.

    log = reader.open_reader()
    faults = [fault for fault in map(reader.find_fault, log.read()) if fault is not None]
    for incident in story.group(faults):
        attribution = story.attribute(incident, processes)

Only reading the journal needs more than the standard library (systemd-python).
"""
