package docker

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"lull/internal/core/instance"
)

// Labels that Compose sets on the containers of a project.
const (
	composeProject = "com.docker.compose.project"
	composeService = "com.docker.compose.service"
	composeNumber  = "com.docker.compose.container-number"
	composeOneOff  = "com.docker.compose.oneoff" // "True" if the container was made by docker compose run
)

// place returns PROJECT/SERVICE/NUMBER for a container of Compose, and "" for any
// other. A container and the one with which Compose replaces it have the same
// place. No container name has this form.
func (d *details) place() string {
	l := d.Config.Labels
	if l[composeProject] == "" || l[composeService] == "" || l[composeNumber] == "" || strings.EqualFold(l[composeOneOff], "true") {
		return ""
	}
	return l[composeProject] + "/" + l[composeService] + "/" + l[composeNumber]
}

// images returns the values of Spec.Image that refer to the container. The first
// also refers to the container that replaces it.
func (d *details) images() []string {
	all := []string{d.place(), d.name(), d.ID, d.ID[:12]}
	if all[0] == "" {
		all = all[1:]
	}
	return all
}

// find inspects the container to which a Spec.Image refers. While Compose replaces
// a container, two have the same place: find then returns the running one, or else
// the newest.
func (r *Runtime) find(ctx context.Context, image string) (*details, error) {
	at := strings.Split(image, "/")
	if len(at) != 3 {
		return r.api.inspect(ctx, strings.TrimPrefix(image, "/"))
	}
	ids, err := r.api.labelled(ctx, composeProject+"="+at[0], composeService+"="+at[1], composeNumber+"="+at[2])
	if err != nil {
		return nil, err
	}
	var newest *details
	for _, id := range ids {
		d, err := r.api.inspect(ctx, id)
		if isStatus(err, 404) || err == nil && d.place() != image {
			continue
		}
		if err != nil {
			return nil, err
		}
		if newest == nil || d.runs() && !newest.runs() {
			newest = d
		}
	}
	if newest == nil {
		return nil, &statusError{404, fmt.Sprintf("no container %s of the service %s in the project %s", at[2], at[1], at[0])}
	}
	return newest, nil
}

// findPatiently is like find, but waits while Docker restarts.
func (r *Runtime) findPatiently(ctx context.Context, image string) (*details, error) {
	for began := time.Now(); ; {
		d, err := r.find(ctx, image)
		if err == nil || !isUnreachable(err) || time.Since(began) > apiLimit {
			return d, err
		}
		select {
		case <-time.After(firstRetry):
		case <-ctx.Done():
			return nil, err
		}
	}
}

// Container implements instance.ContainerAdopter.
func (r *Runtime) Container(ctx context.Context, ref string) (instance.Container, error) {
	ctx, cancel := context.WithTimeout(ctx, apiLimit)
	defer cancel()
	d, err := r.find(ctx, ref)
	if err != nil {
		return instance.Container{}, err
	}
	_, labelled := d.Config.Labels[LabelPauseAfter]
	return instance.Container{Images: d.images(), Name: d.name(), Running: d.runs(), Labelled: labelled}, nil
}

// adopted returns the instance that has adopted a container.
func (f *follower) adopted(d *details) (id string, ok bool) {
	images := d.images()
	slices.Reverse(images) // the most specific reference first
	for _, image := range images {
		if id, ok = f.h.ByImage(instance.RuntimeDocker, image); ok {
			return id, true
		}
	}
	return "", false
}
