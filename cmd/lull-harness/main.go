// Command lull-harness is process 1 of a microVM guest: it brings the guest up
// and runs the one workload that the host asks for (package guestagent).
package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/guestagent"
)

var version = "dev"

func main() {
	if len(os.Args) > 1 && os.Args[1] == "--version" {
		fmt.Println("lull-harness", version)
		return
	}
	if len(os.Args) > 1 && os.Args[1] == "workspace" && os.Getppid() == 1 {
		if err := guestagent.ServeWorkspace(os.Args[2:], os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, "lull-harness: cannot serve the workspace:", err)
			os.Exit(1)
		}
		return
	}
	if len(os.Args) > 1 && os.Args[1] == "files" && os.Getppid() == 1 {
		os.Exit(guestagent.CopyFiles(os.Args[2:], os.Stdin, os.Stdout, os.Stderr))
	}
	if os.Getpid() != 1 {
		fmt.Fprintln(os.Stderr, "lull-harness: cannot run: it is process 1 of a guest, started by the kernel")
		os.Exit(2)
	}
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "lull-harness:", err)
	}
	// Process 1 must not return. The machine is powered off instead, which the host
	// notices.
	unix.Sync()
	if err := unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF); err != nil {
		fmt.Fprintln(os.Stderr, "lull-harness: cannot power off:", err)
	}
	time.Sleep(time.Hour)
}

func run() error {
	cfg, err := guestagent.Boot()
	if err != nil {
		return err
	}
	cfg.Log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	h, err := guestagent.New(cfg)
	if err != nil {
		return err
	}
	return h.Run(context.Background())
}
