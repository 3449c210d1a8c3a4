// Package oci turns images into root file systems. An image is a directory, a tar
// of a root file system, a docker-save archive, an OCI layout (directory or tar),
// or a reference to a registry.
//
// Nothing outside the destination directory is ever changed, whatever names,
// links and whiteouts a layer contains. Sizes, counts and lengths are limited. A
// layer must match its digest (diff_id). An image is present completely or not at
// all, also after a crash. Device files are skipped, because the runtime creates
// those that a container gets.
//
// An unpacked image is shared by all instances and read-only. It is one flat
// directory, so images with common layers share nothing on disk.
//
// Mounting and running are the job of runtime/container. A registry is contacted
// only for images that are not in the store.
package oci
