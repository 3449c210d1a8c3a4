package main

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/link/hostctl"
)

func (c *cli) imageCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "image", Short: "Show and remove what a host keeps of images", Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	ls := &cobra.Command{Use: "ls", Short: "List what is kept of images, the largest first", Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			l, err := cl.Images(cmd.Context())
			if err != nil {
				return err
			}
			return c.print(l, func(w io.Writer) { imageTable(w, l) })
		}}
	var older time.Duration
	prune := &cobra.Command{Use: "prune", Short: "Remove images that no instance uses, and what guests left behind", Args: args(cobra.NoArgs),
		Long: `Remove unpacked images, disks made of them, what guests begin with and files of
guests that no instance uses. A host does that by itself with what nobody has used for its --image-age,
and with what was not used for longest when all take more than --image-space.`,
		Example: "  lull image prune\n  lull image prune --older 24h",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if older < 0 {
				return &usageError{errors.New("cannot use --older: it is negative")}
			}
			cl, err := c.client()
			if err != nil {
				return err
			}
			l, err := cl.Prune(cmd.Context(), older)
			if err != nil {
				return err
			}
			return c.print(l, func(w io.Writer) {
				freed := int64(0)
				for _, i := range l {
					freed += i.Bytes
				}
				imageTable(w, l)
				fmt.Fprintf(w, "%d removed, %s\n", len(l), size(freed))
			})
		}}
	bindSpan(prune.Flags(), &older, "older", 0, "only those made longer ago, as 24h or 7d")
	cmd.AddCommand(ls, prune)
	return cmd
}

func imageTable(w io.Writer, l []hostctl.Image) {
	rows(w, "ID\tKIND\tSIZE\tMADE\tUSED BY\tSOURCE", func(row func(string, ...any)) {
		for _, i := range l {
			by := strings.Join(i.UsedBy, ", ")
			if by == "" && i.InUse {
				by = "a run"
			}
			row("%s\t%s\t%s\t%s\t%s\t%s", i.ID, i.Kind, size(i.Bytes), i.MadeAt.Local().Format(time.DateTime), dash(by), dash(i.Source))
		}
	})
}
