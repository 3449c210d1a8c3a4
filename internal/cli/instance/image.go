package instance

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/cli/term"
	"lull/internal/protocol/hostctl"
)

func (c verbs) imageCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "image", Short: "Manage a host's image cache", Args: term.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	ls := &cobra.Command{Use: "ls", Short: "List cached images, largest first", Example: "  lull image ls", Args: term.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.HostClient()
			if err != nil {
				return err
			}
			l, err := cl.Images(cmd.Context())
			if err != nil {
				return err
			}
			return c.Print(l, func(w io.Writer) { imageTable(w, l) })
		}}
	var older time.Duration
	prune := &cobra.Command{Use: "prune", Short: "Remove unused images and leftover guest files", Args: term.Args(cobra.NoArgs),
		Long: `Remove what no instance uses: unpacked images, disks made from them, guest boot
files and files of removed guests. A host removes these itself once they have been
unused for --image-cache-ttl, and the least recently used first when the total
exceeds --image-cache-size.`,
		Example: "  lull image prune\n  lull image prune --older-than 24h",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if older < 0 {
				return term.Usage(errors.New("cannot use --older-than: want 0 or more"))
			}
			cl, err := c.HostClient()
			if err != nil {
				return err
			}
			l, err := cl.Prune(cmd.Context(), older)
			if err != nil {
				return err
			}
			return c.Print(l, func(w io.Writer) {
				freed := int64(0)
				for _, i := range l {
					freed += i.Bytes
				}
				imageTable(w, l)
				fmt.Fprintf(w, "%d removed, %s\n", len(l), term.Size(freed))
			})
		}}
	term.AcceptFormer(prune.Flags(), map[string]string{"older": "older-than"})
	term.BindSpan(prune.Flags(), &older, "older-than", 0, "only remove files older than this, such as 24h or 7d")
	cmd.AddCommand(ls, prune)
	return cmd
}

func imageTable(w io.Writer, l []hostctl.Image) {
	term.Rows(w, "ID\tKIND\tSIZE\t1:MADE\t3:USED BY\t2:SOURCE", func(row func(string, ...any)) {
		for _, i := range l {
			by := strings.Join(i.UsedBy, ", ")
			if by == "" && i.InUse {
				by = "a run"
			}
			row("%s\t%s\t%s\t%s\t%s\t%s", i.ID, i.Kind, term.Size(i.Bytes), term.Time(i.MadeAt), term.Dash(by), term.Dash(i.Source))
		}
	})
}
