// Package oci turns images into root file systems: a directory, a tar of a
// root file system, a docker-save archive, an OCI layout (directory or tar), or
// a reference to a registry.
//
// It guarantees that nothing outside the directory it unpacks into is ever
// touched, whatever names, links and whiteouts a layer holds; that sizes,
// numbers and lengths are bounded; that a layer is what its image says
// (diff_id); and that an image is there whole or not at all, also after a
// crash. Device files of a layer are left out: a runtime makes those that a
// container gets.
//
// An unpacked image is shared by every instance and read only. It is flat: one
// directory for an image, so images that share layers share nothing on disk.
//
// It leaves out mounting and running (edge/runtime/container), and asks a
// registry only for what is not in its store.
package oci
