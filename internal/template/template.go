// Package template builds what the machines of a template boot from: a *base
// image* (an EROFS file system of a Debian), a *kernel* and an *initramfs*
// with the guest agent and the kernel's modules. Together with template.json,
// their *record*, they are the template's *artifacts*, a folder that appears
// whole or not at all.
//
// The base snapshot, for which a machine must boot, is not made here.
package template
