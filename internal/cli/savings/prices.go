package savings

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"lull/internal/cli/term"
	"lull/internal/core/savings"
	"lull/internal/protocol/control"
)

func (c verbs) pricesCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "prices", Short: "Show the price table that savings are based on", Args: term.Args(cobra.NoArgs),
		Long: `Show the server's price table, with the source and the date of each price.
What the table does not list is unknown, and no savings are claimed for it.`,
		Example: "  lull savings prices\n  lull savings prices refresh",
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			p, err := control.Read[control.Prices](cmd.Context(), cl, "/savings/prices")
			if err != nil {
				return err
			}
			return c.Print(p, func(w io.Writer) { pricesText(w, p) })
		}}
	cmd.AddCommand(&cobra.Command{Use: "refresh", Short: "Fetch current prices of what the workers use from AWS", Args: term.Args(cobra.NoArgs),
		Long: `Read the on-demand prices of the regions, instance types and volume types in use
from the AWS Price List API, and keep them with their date. The server's
credentials need pricing:GetProducts. Prices that AWS does not list stay unknown.`,
		Example: "  lull savings prices refresh",
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			r, err := control.Write[control.PriceRefresh](cmd.Context(), cl, "POST", "/savings/prices/refresh", nil)
			if err != nil {
				return err
			}
			return c.Print(r, func(w io.Writer) { refreshText(w, r) })
		}})
	return cmd
}

// pricesText prints prices, after a line about what they cover.
func pricesText(w io.Writer, p control.Prices) {
	regions, count := map[string]bool{}, map[string]int{}
	for _, x := range p.Items {
		regions[x.Region] = true
		count[x.Source]++
	}
	var parts []string
	for _, source := range []string{control.PriceOfFile, control.PriceRefreshed, control.PriceBuiltIn} {
		if n := count[source]; n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, source))
		}
	}
	fmt.Fprintf(w, "%s, in %s.", strings.Join(parts, " and "), strings.Join(slices.Sorted(maps.Keys(regions)), ", "))
	if p.RefreshedAt != nil {
		fmt.Fprintf(w, " Last refreshed %s by %s.", term.Time(*p.RefreshedAt), cmp.Or(p.RefreshedBy, "an unknown user"))
	}
	fmt.Fprint(w, "\n\n")
	term.Rows(w, "REGION\tKIND\tNAME\tUSD\tPER\tAS OF\tSOURCE", func(row func(string, ...any)) {
		for _, x := range p.Items {
			per := "hour"
			if x.Kind == savings.Storage {
				per = "GB-month"
			}
			row("%s\t%s\t%s\t%g\t%s\t%s\t%s", x.Region, x.Kind, x.Name, x.USD, per, x.AsOf, x.Source)
		}
	})
}

func refreshText(w io.Writer, r control.PriceRefresh) {
	fmt.Fprintf(w, "refreshed %d prices\n", r.Refreshed)
	for _, m := range r.Missing {
		fmt.Fprintf(w, "AWS lists no single price for %s %s in %s; the stored price is unchanged\n", m.Kind, m.Name, m.Region)
	}
}
