// SPDX-License-Identifier: GPL-2.0
/*
 * A platform device "fb000000.gpu" with a driver "mali" that has no hardware and does nothing but log: what is
 * written to its attribute "say" becomes records as Arm's kbase writes them, made by the kernel itself.
 *
 *   echo fault TGID CONTEXT GROUP	a queue that failed (CS_FATAL, CS_CONFIG_FAULT)
 *   echo page TID			a page fault of a thread
 *   echo hang TGID CONTEXT GROUP	a queue group without progress
 *   echo reset				the GPU is reset
 *   echo talk				a warning that is no fault
 */
#include <linux/mod_devicetable.h>
#include <linux/module.h>
#include <linux/platform_device.h>

static struct platform_device *gpu;

static ssize_t say_store(struct device *dev, struct device_attribute *attr, const char *text, size_t size)
{
	unsigned int process = 0, context = 0, group = 0;
	char what[16];

	if (sscanf(text, "%15s %u %u %u", what, &process, &context, &group) < 1)
		return -EINVAL;
	if (!strcmp(what, "fault"))
		dev_warn(dev, "Ctx %u_%u Group %u CSG 0 CSI: 0\n"
			 "CS_FATAL.EXCEPTION_TYPE: 0x40 (CS_CONFIG_FAULT)\n"
			 "CS_FATAL.EXCEPTION_DATA: 0x0\n"
			 "CS_FATAL_INFO.EXCEPTION_DATA: 0x0\n", process, context, group);
	else if (!strcmp(what, "page"))
		dev_err(dev, "Unhandled Page fault in AS1 at VA 0x0000007FDEADB000\n"
			"Reason: Memory is not mapped\n"
			"raw fault status: 0xA003C3\n"
			"exception type 0xC3: TRANSLATION_FAULT_3\n"
			"access type 0x3: WRITE\n"
			"source id 0xA0\n"
			"pid: %u\n", process);
	else if (!strcmp(what, "hang"))
		dev_warn(dev, "[1234567] Iterator PROGRESS_TIMER timeout notification received for group %u"
			 " of ctx %u_%u on slot 0 with state 3\n", group, process, context);
	else if (!strcmp(what, "reset"))
		dev_err(dev, "Resetting GPU (allowing up to 500 ms)\n");
	else if (!strcmp(what, "talk"))
		dev_warn(dev, "Loading Mali firmware 0x1010000\n");
	else
		return -EINVAL;
	return size;
}
static DEVICE_ATTR_WO(say);

static struct attribute *gpu_attrs[] = { &dev_attr_say.attr, NULL };
ATTRIBUTE_GROUPS(gpu);

static int gpu_probe(struct platform_device *device)
{
	dev_info(&device->dev, "a stand-in that only logs\n");
	return 0;
}

/* As the device tree's "gpu@fb000000" of an RK3588 would be named. */
static const struct platform_device_id gpu_ids[] = { { "fb000000.gpu" }, { } };

static struct platform_driver driver = {
	.probe = gpu_probe,
	.id_table = gpu_ids,
	.driver = { .name = "mali", .dev_groups = gpu_groups },
};

static int __init start(void)
{
	int error;

	gpu = platform_device_register_simple(gpu_ids[0].name, PLATFORM_DEVID_NONE, NULL, 0);
	if (IS_ERR(gpu))
		return PTR_ERR(gpu);
	error = platform_driver_register(&driver);
	if (error)
		platform_device_unregister(gpu);
	return error;
}

static void __exit stop(void)
{
	platform_driver_unregister(&driver);
	platform_device_unregister(gpu);
}

module_init(start);
module_exit(stop);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("Stands in for a Mali GPU in honed's tests: writes records to the kernel log");
